// Package servers starts real servers as child processes of a test, a benchmark
// or a command, and breaks them on purpose: kill, pause, restart, failover,
// migration, and faults on the wire.
//
//	r := servers.StartRedis(t, nil)
//	client := redis.NewClient(&redis.Options{Addr: r.Addr()})
//	r.Pause()  // it accepts connections and answers nothing
//	r.Resume() // it does all that was sent meanwhile
//
// [StartRedis] and [StartMasters] start independent servers, [StartSentinel] a
// primary with replicas and three sentinels, [StartCluster] a Redis Cluster.
// [StartZooKeeper] starts a ZooKeeper server or an ensemble, [StartPostgres] a
// PostgreSQL server, [StartMariaDB] a MariaDB server.
// [StartProxy] puts a [Proxy] in front of any TCP server.
//
// Servers listen on 127.0.0.1, on random ports that they keep over restarts, and
// work in a temporary folder. The cleanup of the test kills them, waits for them
// and removes the folder; a server whose parent is killed is killed by the
// kernel. What a test asks for is ready when the function returns. Nothing here
// guarantees that it stays so: tests that break a server wait with WaitReady,
// WaitPrimary or Restart for the state that they need. A server that is neither
// dead nor paused is said to run.
//
// A function that cannot do what it is asked for fails the test, with the end of
// the server's log where there is one. Like Fatalf of package testing,
// such functions are for the goroutine that runs the test. If the server is not installed the
// test is skipped, but it fails if the environment variable CI or
// DLM_TEST_REQUIRE is set. Servers are started on Linux only.
package servers
