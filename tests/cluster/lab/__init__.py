"""A real Kubernetes on one machine, without Docker and without a registry of images.

``python -m tests.cluster.lab up`` (``make cluster``). A node is a network namespace with its own
containerd, kubelet and kube-proxy; etcd and the control plane run beside them. What is built
(parts.py, images.py) is cached; what one cluster is (cluster.py) stands in one folder, under
one name and one number from which its bridge, namespaces, addresses and cgroups come: any number
of clusters live side by side.
"""
