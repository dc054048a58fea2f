"""The detectors of a job that does not train as it should, and their verdicts."""
