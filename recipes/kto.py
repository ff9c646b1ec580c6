"""KTO: a policy from answers judged good or bad; shortest paths on a hidden graph unless told otherwise.

python -m recipes.kto fit
python -m recipes.kto fit --model.model_name_or_path exported/sft --data.path judgements.jsonl
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="kto/paths.yaml")
