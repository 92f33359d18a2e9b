# Runs in the pods of the bundled Redis with Sentinels, each of which has a server and a Sentinel.
# SELF is the name of this pod, SERVERS the names of all pods; the first is the master of a new set.
set -eu
state=/data/sentinel.conf
cli=$(command -v valkey-cli || command -v redis-cli)

# A word as configuration files have it.
quoted() {
  printf '"%s"' "$(printf %s "$1" | sed 's/[\\"]/\\&/g')"
}

server() { # HOST COMMAND...
  host=$1
  shift
  REDISCLI_AUTH=$REDIS_PASSWORD timeout 3 "$cli" -h "$host" "$@" 2> /dev/null || true
}

sentinel() { # HOST COMMAND...
  server "$1" -p 26379 --user headrace-sentinel SENTINEL "$2" headrace
}

others() {
  for each in $SERVERS; do test "$each" = "$SELF" || echo "$each"; done
}

# Epoch and master, as the Sentinel of a host sees them; nothing if it does not answer.
view() {
  sentinel "$1" MASTER | {
    master=
    epoch=0
    while read -r key && read -r value; do
      case $key in ip) master=$value ;; config-epoch) epoch=$value ;; esac
    done
    test -z "$master" || echo "$epoch $master"
  }
}

# The same, as this pod's Sentinel has saved it.
saved() {
  test -f $state || return 0
  master=
  epoch=0
  while read -r first second _ value _; do
    case "$first $second" in "sentinel monitor") master=$value ;; "sentinel config-epoch") epoch=$value ;; esac
  done < $state
  test -z "$master" || echo "$epoch $master"
}

# Each failover has a higher epoch than those before it.
master() {
  found=$({ saved; for each in $(others); do view "$each"; done; } | sort -n | tail -n 1)
  if test -n "$found"; then echo "${found#* }"; else echo "${SERVERS%% *}"; fi
}

role() { server "$1" ROLE | head -n 1; }

# Whether any other server has keys, or is still reading them.
others_have_keys() {
  for each in $(others); do
    case $(server "$each" DBSIZE) in 0 | "") ;; *) return 0 ;; esac
  done
  return 1
}

others_answer() {
  for each in $(others); do test -n "$(server "$each" PING)" || return 1; done
}

# Writes the part of the server's configuration that says whose replica it is.
place() {
  if ! ls -d /data/appendonly* > /dev/null 2>&1; then
    # This server is empty. As the master it would empty the others, so one of those with keys becomes master first.
    tries=30
    while test "$(master)" = "$SELF" && test $tries -gt 0 && ! others_answer; do
      tries=$((tries - 1))
      sleep 1
    done
    while test "$(master)" = "$SELF" && others_have_keys; do sleep 1; done
  fi
  master=$(master)
  {
    echo "replica-announce-ip $SELF"
    printf '%s\n' "masterauth $(quoted "$REDIS_PASSWORD")"
    test "$master" = "$SELF" || echo "replicaof $master 6379"
  } > /run/redis/place.conf
}

# Starts the Sentinel with what it has saved about masters, replicas and other Sentinels.
watch() {
  umask 077
  {
    cat /etc/redis/sentinel.conf
    echo "sentinel announce-ip $SELF"
    printf '%s\n' "user headrace-sentinel on ~* &* +@all $(quoted ">$REDIS_PASSWORD")"
    printf '%s\n' "sentinel sentinel-user headrace-sentinel" "sentinel sentinel-pass $(quoted "$REDIS_PASSWORD")"
    if test -n "$(saved)"; then
      grep -E '^sentinel (myid|current-epoch|monitor|config-epoch|leader-epoch|known-replica|known-sentinel) ' $state
    else
      echo "sentinel monitor headrace $(master) 6379 2"
    fi
    printf '%s\n' "sentinel auth-pass headrace $(quoted "$REDIS_PASSWORD")"
  } > $state.new
  mv $state.new $state
  unset REDIS_PASSWORD
  exec "$(command -v valkey-server || command -v redis-server)" $state --sentinel
}

# Succeeds for a master, and for a replica that has its data.
ready() {
  server 127.0.0.1 ROLE | {
    read -r role
    test "$role" = master && exit 0
    read -r _ && read -r _ && read -r link && test "$link" = connected
  }
}

in_step() {
  server 127.0.0.1 ROLE | {
    read -r _ && read -r written
    while read -r _ && read -r _ && read -r offset; do test "$offset" -ge "$written" || exit 1; done
  }
}

# Succeeds once another server is master, which then is this one's.
replaced() {
  for each in $(others); do
    test "$(role "$each")" != master || { server 127.0.0.1 REPLICAOF "$each" 6379 && return 0; }
  done
  return 1
}

asked() {
  for each in $(others); do
    test "$(sentinel "$each" FAILOVER)" != OK || return 0
  done
  return 1
}

# Tries for some seconds: SECONDS COMMAND
within() {
  end=$(($(date +%s) + $1))
  until "$2"; do
    test "$(date +%s)" -lt $end || return 1
    sleep 0.5
  done
}

# Before a master ends, another server becomes master. Writes wait until then, so that none is lost.
leave() {
  test "$(role 127.0.0.1)" = master || return 0
  server 127.0.0.1 CLIENT PAUSE 30000 WRITE
  within 5 in_step || true
  within 10 asked && within 15 replaced || true
  server 127.0.0.1 CLIENT UNPAUSE
}

"$1"
