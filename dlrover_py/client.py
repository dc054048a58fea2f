"""Jobs for programs and notebooks.

::

    from dlrover_py.client import Jobs

    jobs = Jobs()                     # of this machine; Jobs(namespace="team-a") of a cluster
    job = jobs.submit("job.yaml")
    job.scale(4)
    print(job.wait(), job.goodput())

``jobs.list()`` and ``job`` are shown as pages in a notebook.
"""

from dlrover_py.cli.jobs import JobList as JobList
from dlrover_py.cli.jobs import Jobs as Jobs
from dlrover_py.cli.jobs import NamedJob as NamedJob
from dlrover_py.protocol.job_view import TimeShare as TimeShare
