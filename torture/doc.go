// Package torture holds tests of what a power failure and a failing disk do to
// the store. README.md says what they do and how they are run.
package torture
