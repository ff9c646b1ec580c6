"""Proximal policy optimization; CartPole unless told otherwise.

python -m recipes.ppo fit
python -m recipes.ppo fit --config ppo/lunarlander.yaml --model.clip_range 0.1
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="ppo/cartpole.yaml")
