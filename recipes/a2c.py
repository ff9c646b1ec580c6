"""Advantage actor-critic; CartPole unless told otherwise.

python -m recipes.a2c fit
python -m recipes.a2c fit --config a2c/lunarlander.yaml --model.gamma 0.99
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="a2c/cartpole.yaml")
