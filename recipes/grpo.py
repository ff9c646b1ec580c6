"""Group relative policy optimization; two-digit addition unless told otherwise.

python -m recipes.r1 --cold_start sft/addition_start.yaml --grpo grpo/addition.yaml --folder runs/addition
python -m recipes.grpo fit                              once the first stage of that has made the model to start from
python -m recipes.grpo fit --model.loss_type dr_grpo --model.scale_rewards none
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="grpo/addition.yaml")
