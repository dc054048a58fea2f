"""The client of the Kubernetes API server: requests, watches, credentials and kubeconfigs."""
