"""Steps from a plan's input to a validated plan."""
