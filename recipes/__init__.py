"""Programs to run and to copy: one per algorithm, the pipelines, and the ``rl`` command."""
