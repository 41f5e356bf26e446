package a

import "errors"

var errA = errors.New("a")

func compare(err error) []bool {
	//lint:ignore errorlint it must be this very error
	above := err == errA
	return []bool{
		above,
		//lint:ignore SA1000,errorlint so must this
		err == errA,
		err == errA, // want "will fail on wrapped errors"
		//lint:ignore errorlint
		err == errA, // want "will fail on wrapped errors"
		//lint:ignore noctx another analyzer
		err == errA, // want "will fail on wrapped errors"
	}
}
