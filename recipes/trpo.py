"""Trust region policy optimization; CartPole unless told otherwise.

python -m recipes.trpo fit
python -m recipes.trpo fit --config trpo/acrobot.yaml --model.target_kl 0.02
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="trpo/cartpole.yaml")
