package main

import "flag"

var scratch = flag.String("dir", "", "`directory` of the files that are written; empty means the system's temporary one")

func main() { flag.Parse() }
