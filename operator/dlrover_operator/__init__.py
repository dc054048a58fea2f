"""The operator: makes each ElasticJob's master, and looks after it. Workers are the master's."""
