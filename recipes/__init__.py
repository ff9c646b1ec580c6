"""What a person runs: the command line, and one short file per recipe."""
