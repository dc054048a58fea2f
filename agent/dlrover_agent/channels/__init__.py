"""The agent's connections to the master, to the user's script and to other agents."""
