// Package zklock keeps locks in ZooKeeper.
package zklock
