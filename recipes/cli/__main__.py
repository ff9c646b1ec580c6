"""``python -m recipes.cli`` is ``rl``."""

from recipes.cli import main

if __name__ == "__main__":
    main()
