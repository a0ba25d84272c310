"""From components, applications, SLOs and a GPU price list to a plan and its launch commands."""
