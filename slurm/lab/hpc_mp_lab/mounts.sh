# hide DIR PATH…: an empty, private DIR that everybody may pass, in which only the given paths below it are still there.
hide() {
    local top=$1 path
    shift
    mount -t tmpfs -o mode="$(stat -c %a "$top")" tmpfs /srv
    chmod o+rx /srv
    for path in "$@"; do
        mkdir -p "/srv/${path#"$top"/}"
        mount --bind "$path" "/srv/${path#"$top"/}"
    done
    mount --move /srv "$top"
}

# live_in DIR PATH…: DIR's system instead of the machine's, and nothing is written into it; PATHs of the machine stay.
live_in() {
    local system=$1 path
    shift
    mount -t tmpfs tmpfs /srv
    mkdir /srv/{written,work,root}
    mount -t overlay overlay -o "lowerdir=$system,upperdir=/srv/written,workdir=/srv/work" /srv/root
    for path in /dev /proc /sys /tmp "$@"; do
        mkdir -p "/srv/root$path"
        mount --rbind "$path" "/srv/root$path"
    done
    cd /srv/root
    pivot_root . srv
    umount --lazy /srv
    hash -r
}
