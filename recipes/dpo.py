"""DPO: a policy from preferences, without a reward model; shortest paths on a hidden graph unless told otherwise.

python -m recipes.rlhf                               first: trains the SFT policy and writes the comparisons
python -m recipes.dpo fit
python -m recipes.dpo fit --model.loss_type ipo --model.model_name_or_path exported/sft --data.path pairs.jsonl
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="dpo/paths.yaml")
