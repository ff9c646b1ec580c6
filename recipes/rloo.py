"""RLOO: REINFORCE with the other completions of a prompt as the baseline; two-digit addition unless told otherwise.

python -m recipes.rloo fit --model.model_name_or_path exported/sft
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="rloo/addition.yaml")
