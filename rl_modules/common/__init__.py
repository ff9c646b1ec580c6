"""What algorithms and experience share: the contract between them, errors, spaces, schedules, seeds."""
