"""RLHF with PPO, its last stage alone; shortest paths on a hidden graph unless told otherwise.

python -m recipes.rlhf                               first: trains the policy and the reward model that it starts from
python -m recipes.rlhf_ppo fit
python -m recipes.rlhf_ppo fit --model.beta 0.02 --model.model_name_or_path sft --model.reward_model_name_or_path reward
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="rlhf_ppo/paths.yaml")
