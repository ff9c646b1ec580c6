"""Deep Q-networks; CartPole unless told otherwise.

python -m recipes.dqn fit
python -m recipes.dqn fit --config dqn/lunarlander.yaml --model.double true
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="dqn/cartpole.yaml")
