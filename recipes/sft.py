"""Supervised fine-tuning; two-digit addition, from scratch, unless told otherwise.

python -m recipes.sft fit
python -m recipes.sft fit --config sft/paths.yaml --model.learning_rate 3e-4
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="sft/addition.yaml")
