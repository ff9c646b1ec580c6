"""Fast paths of the language algorithms: each stands beside its plain twin, see :func:`rl_modules.fast.is_fast`."""
