# A training node (target `node`) and what tests a job of them (target `tests`).
# For GPUs: --build-arg TORCH_INDEX= takes torch with CUDA, which is ten times as large.
# The digest is that of August 2026 in docker-library/repo-info; docs/contributing/release.md says how it is raised.
ARG BASE=debian:bookworm-slim@sha256:abd67ffcfa541b485a3dff59865ab629aa048a6c613e639d36e7456b0b229241
FROM $BASE AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home trainer \
    && install -d -o trainer -g trainer /checkpoints
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

# All that the package needs, so that a change in its source does not install torch again.
FROM python AS dependencies
# Where torch for the CPU is. Wheels in build/wheels are found, too; with PIP_NO_INDEX=1 only they.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_NO_INDEX=
ENV PIP_EXTRA_INDEX_URL=$TORCH_INDEX PIP_NO_INDEX=$PIP_NO_INDEX PIP_FIND_LINKS=/wheels \
    PIP_CONSTRAINT=/wheels/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY scripts/constraints.txt scripts/locked.txt build/wheels* /wheels/
WORKDIR /src
COPY setup.cfg pyproject.toml LICENSE ./
COPY elastic_etcd/version.py elastic_etcd/
# All but torch by their hashes; scripts/lock makes the list, with what the examples need.
RUN python3 -m venv /opt/venv \
    && pip install --require-hashes --no-deps --requirement /wheels/locked.txt \
    && pip install '.[metrics,web]'

FROM dependencies AS build
COPY README.md ./
COPY elastic_etcd elastic_etcd
RUN pip wheel --no-deps --wheel-dir /dist .

FROM python AS node
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=build /dist /dist
RUN pip install --no-deps --no-index --force-reinstall /dist/*.whl
COPY examples /examples
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["python", "-m", "elastic_etcd.launch"]

FROM dependencies AS tests
RUN pip install '.[embedded,test]'
COPY . .
ENV PYTHONPATH=/src
CMD ["python", "-m", "pytest", "-v", "tests/compose"]
