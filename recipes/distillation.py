"""Distillation: a student learns a teacher's distributions on its own answers; two-digit addition by default.

python -m recipes.distillation fit --model.model_name_or_path START --model.teacher_model_name_or_path TEACHER
"""

from recipes.cli import main

if __name__ == "__main__":
    main(default_config="distillation/addition.yaml")
