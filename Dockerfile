# The images of DLRover-Py: one file, a target each.
#
#   docker build --target operator -t dlrover-py-operator .      (buildah bud … works as well)
#   docker build --target master   -t dlrover-py-master   .
#   docker build --target agent    -t dlrover-py-agent    .      --build-arg TORCH=2.9.0 puts torch in
#   docker build --target examples -t dlrover-py-examples .      --build-arg TORCH=2.9.0
#
# The agent's image is also the base of a job's image: `elastic-run` and `python` are on its PATH.
#
#   FROM dlrover-py-agent
#   COPY train.py /workspace/
#   CMD ["elastic-run", "--nnodes=2:4", "--nproc-per-node=8", "/workspace/train.py"]
#
# Libraries may also come by a volume: what is mounted at /opt/libraries (a folder as
# site-packages, of the same Python) can be imported.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# The libraries come first, and the source last: a changed line makes small layers anew.
FROM ${PYTHON_IMAGE} AS libraries
WORKDIR /source
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/venv \
    && echo /opt/libraries > "$(echo /opt/venv/lib/python3.*/site-packages)/libraries.pth"
COPY pyproject.toml constraints.txt ./
RUN /build/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
        print(*p['build-system']['requires'], sep='\n', file=open('/build/build.txt', 'w')); \
        print(*p['project']['dependencies'], sep='\n', file=open('/build/ours.txt', 'w')); \
        extras = p['project']['optional-dependencies']; \
        print(*extras['operator'], *extras['opentelemetry'], sep='\n', \
              file=open('/build/operator.txt', 'w'))" \
    && /build/bin/pip install --no-cache-dir --quiet -c constraints.txt -r /build/build.txt \
    && /build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --quiet --no-compile \
        -c constraints.txt -r /build/ours.txt \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/venv/lib

# What only the programs in the cluster need, as what comes on top.
FROM libraries AS operator-libraries
RUN mkdir -p /top/opt/venv && /build/bin/pip --python /opt/venv/bin/python install \
        --no-cache-dir --quiet --no-compile --root /top \
        -c constraints.txt -r /build/operator.txt \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /top/opt/venv

# What a parameter server needs: its coordinator is in the master, its servers are in the agent's image.
# Neither needs torch. Both write cuts, perhaps into a bucket.
FROM libraries AS ps-libraries
RUN mkdir -p /top/opt/venv && /build/bin/python -c "import tomllib; \
        p = tomllib.load(open('pyproject.toml', 'rb')); \
        extras = p['project']['optional-dependencies']; \
        needed = extras['ps'] + extras['s3']; \
        print(*(one for one in needed if not one.startswith('torch')), sep='\n', \
              file=open('/build/ps.txt', 'w'))" \
    && /build/bin/pip --python /opt/venv/bin/python install \
        --no-cache-dir --quiet --no-compile --root /top \
        -c constraints.txt -r /build/ps.txt \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /top/opt/venv

FROM libraries AS torch
ARG TORCH=
RUN mkdir -p /top/opt/venv && if [ -n "${TORCH}" ]; then \
        /build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --quiet --root /top \
            "torch==${TORCH}"; fi

FROM torch AS examples-libraries
RUN mkdir -p /more/opt/venv && if [ -n "${TORCH}" ]; then \
        /build/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
            print(*p['project']['optional-dependencies']['examples'], sep='\\n', \
                  file=open('/build/examples.txt', 'w'))" \
        && PYTHONPATH=$(echo /top/opt/venv/lib/python3.*/site-packages) \
            /build/bin/pip --python /opt/venv/bin/python install --no-cache-dir --quiet \
            --root /more -c constraints.txt -r /build/examples.txt; fi

FROM libraries AS source
COPY . .
RUN /build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /build/dist . \
    && /build/bin/pip --python /opt/venv/bin/python install --quiet --no-deps --no-compile \
        --root /ours /build/dist/*.whl \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /ours/opt/venv/lib

FROM ${PYTHON_IMAGE} AS user
RUN echo 'dlrover:x:65532:65532::/workspace:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'dlrover:x:65532:' >> /etc/group \
    && mkdir /workspace && chown 65532:65532 /workspace
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1
WORKDIR /workspace
COPY --from=libraries /opt/venv /opt/venv

FROM user AS agent
COPY --from=ps-libraries /top/opt/venv /opt/venv
COPY --from=torch /top/opt/venv /opt/venv
COPY --from=source /ours/opt/venv /opt/venv
USER 65532:65532

# The jobs of examples/: `kubectl apply -f examples/01-digits/job.yaml`.
FROM agent AS examples
COPY --from=examples-libraries /more/opt/venv /opt/venv
COPY --chown=65532:65532 examples /examples

FROM user AS cluster-program
COPY --from=operator-libraries /top/opt/venv /opt/venv
COPY --from=source /ours/opt/venv /opt/venv
USER 65532:65532

FROM cluster-program AS master
COPY --from=ps-libraries /top/opt/venv /opt/venv
ENTRYPOINT ["dlrover-master"]

FROM cluster-program AS operator
ENTRYPOINT ["dlrover-operator"]
