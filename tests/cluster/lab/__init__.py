"""A real Kubernetes cluster on one machine, without Docker and without an image registry.

``python -m tests.cluster.lab up`` (``make cluster``) starts it. A node is a network namespace with
its own containerd, kubelet and kube-proxy. etcd and the control plane run beside the nodes. Built
programs and images (parts.py, images.py) are cached. The state of a cluster (cluster.py) is in one
folder. Its bridge, namespaces, addresses and cgroups are derived from its name and number. So
several clusters can run at the same time.
"""
