"""Code shared by algorithms and datamodules: the contract between them, errors, spaces, schedules, seeds."""
