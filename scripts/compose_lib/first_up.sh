# What a user does first: up, kill, pause, scale. Rank 0 prints how many nodes train.

prints() { # a line with this comes within so many seconds, from any node
    say "waiting for: $2"
    timeout "$1" $compose logs --no-color --follow --tail 0 2>/dev/null | grep -m 1 "$2" >&2 ||
        { $compose logs --tail 20 >&2; die "nobody printed: $2"; }
}

first_up() {
    say "up"
    $compose up -d
    prints 240 "world 4"
    say "kill node2"
    $compose kill node2
    prints 60 "world 3"
    say "pause node3"
    $compose pause node3
    prints 60 "world 2"
    say "unpause node3, up --scale node=1"
    $compose unpause node3
    $compose up -d --scale node=1
    prints 240 "world 5"
    $compose down -v
}
