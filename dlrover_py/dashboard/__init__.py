"""The dashboard: pages about jobs for a browser, made of the same status that the CLI prints."""
