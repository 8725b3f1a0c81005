#!/bin/sh
# Makes certificates for tests in DIR: two CAs (ca, other-ca); of the first server, server2 (both for
# localhost and 127.0.0.1), client, and expired; of the other one foreign. Each is NAME.pem and NAME.key.
# usage: make_certificates.sh DIR
set -eu
cd "$1"

make_ca() {  # NAME
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj "/CN=$1" \
    -keyout "$1.key" -out "$1.pem"
}

make_certificate() {  # NAME CA DAYS
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
    -keyout "$1.key" -out "$1.csr"
  printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\n' > "$1.ext"
  openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -CAcreateserial -days "$3" \
    -extfile "$1.ext" -out "$1.pem"
  rm "$1.csr" "$1.ext"
}

make_ca ca
make_ca other-ca
for name in server server2 client; do make_certificate $name ca 30; done
make_certificate expired ca -1
make_certificate foreign other-ca 30
