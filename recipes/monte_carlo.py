"""Monte Carlo control; FrozenLake unless told otherwise.

python -m recipes.monte_carlo fit
python -m recipes.monte_carlo fit --config monte_carlo/maze.yaml --model.gamma 0.95
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="monte_carlo/frozenlake.yaml")
