"""Elastic training with other frameworks. Each module imports the framework that it is named after.

Nothing is imported by the package itself, so a script needs only the framework that it uses.
"""
