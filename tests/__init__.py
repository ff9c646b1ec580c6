"""Tests; the package exists so that `tests.envs:make_...` can be an environment's id."""
