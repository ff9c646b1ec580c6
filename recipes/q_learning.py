"""Q-learning and Double Q-learning; FrozenLake unless told otherwise.

python -m recipes.q_learning fit
python -m recipes.q_learning fit --config q_learning/maze.yaml --model.gamma 0.95
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="q_learning/frozenlake.yaml")
