"""From a plan's input to a validated plan, step by step."""
