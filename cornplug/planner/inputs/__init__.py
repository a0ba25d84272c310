"""What a plan is made from: the input file, and the tables and checkpoints that it names."""
