package pglock
