# hide DIR PATH…: an empty, private DIR that everybody may pass, in which only the given paths below it are still there.
hide() {
    local top=$1 path
    shift
    mount -t tmpfs -o mode="$(stat -c %a "$top")" tmpfs /mnt
    chmod o+rx /mnt
    for path in "$@"; do
        mkdir -p "/mnt/${path#"$top"/}"
        mount --bind "$path" "/mnt/${path#"$top"/}"
    done
    mount --move /mnt "$top"
}

# live_in DIR PATH…: DIR's system instead of the machine's, and nothing is written into it; PATHs of the machine stay.
live_in() {
    local system=$1 path
    shift
    mount -t tmpfs tmpfs /mnt
    mkdir /mnt/{written,work,root}
    mount -t overlay overlay -o "lowerdir=$system,upperdir=/mnt/written,workdir=/mnt/work" /mnt/root
    for path in /dev /proc /sys /tmp "$@"; do
        mkdir -p "/mnt/root$path"
        mount --rbind "$path" "/mnt/root$path"
    done
    cd /mnt/root
    pivot_root . mnt
    umount --lazy /mnt
    hash -r
}
