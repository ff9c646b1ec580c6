"""REINFORCE and the vanilla policy gradient; CartPole unless told otherwise.

python -m recipes.reinforce fit
python -m recipes.reinforce fit --config reinforce/cartpole_vpg.yaml
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="reinforce/cartpole.yaml")
