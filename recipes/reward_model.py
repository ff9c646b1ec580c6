"""Reward model from preferences; shortest paths on a hidden graph, from scratch, unless told otherwise.

python -m recipes.reward_model fit
python -m recipes.reward_model fit --config reward_model/tldr.yaml --model.model_name_or_path exported/sft
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="reward_model/paths.yaml")
