"""What is: raw objects of the API server, reduced to frozen facts and gathered into one snapshot for the planner."""
