"""`forebay plan`: what applying a file would change, pod by pod and object by object, without changing anything."""
