"""SARSA and Expected SARSA; CliffWalking unless told otherwise.

python -m recipes.sarsa fit
python -m recipes.sarsa fit --config sarsa/maze.yaml --model.gamma 0.95
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="sarsa/cliffwalking.yaml")
