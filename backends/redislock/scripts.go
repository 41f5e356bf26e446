package redislock

import (
	"crypto/sha1"
	_ "embed"
	"encoding/hex"
)

// The scripts. Each begins with the case that happens almost always, goes on with
// one that is frequent under contention, and then with what all share (queue.lua).
var (
	//go:embed lua/acquire.lua
	acquireLua string
	//go:embed lua/acquire_wait.lua
	acquireWaitLua string
	//go:embed lua/acquire_slow.lua
	acquireSlowLua string
	//go:embed lua/release.lua
	releaseLua string
	//go:embed lua/release_next.lua
	releaseNextLua string
	//go:embed lua/release_slow.lua
	releaseSlowLua string
	//go:embed lua/force.lua
	forceLua string
	//go:embed lua/force_slow.lua
	forceSlowLua string
	//go:embed lua/tell.lua
	tellLua string
	//go:embed lua/queue.lua
	queueLua string
	//go:embed lua/extend.lua
	extendLua string
	//go:embed lua/inspect.lua
	inspectLua string
	//go:embed lua/probe.lua
	probeLua string
	//go:embed lua/quorum_head.lua
	quorumHeadLua string
	//go:embed lua/quorum_acquire.lua
	quorumAcquireLua string
	//go:embed lua/quorum_settle.lua
	quorumSettleLua string
	//go:embed lua/quorum_token.lua
	quorumTokenLua string
	//go:embed lua/quorum_release.lua
	quorumReleaseLua string
	//go:embed lua/quorum_extend.lua
	quorumExtendLua string
	//go:embed lua/quorum_inspect.lua
	quorumInspectLua string
	//go:embed lua/quorum_begin.lua
	quorumBeginLua string

	acquireScript = newScript(acquireLua + acquireWaitLua + tellLua + queueLua + acquireSlowLua)
	releaseScript = newScript(releaseLua + tellLua + releaseNextLua + queueLua + releaseSlowLua)
	forceScript   = newScript(forceLua + tellLua + queueLua + forceSlowLua)
	extendScript  = newScript(extendLua)
	inspectScript = newScript(inspectLua)
	probeScript   = newScript(probeLua)

	quorumAcquireScript = newScript(quorumHeadLua + quorumAcquireLua)
	quorumSettleScript  = newScript(quorumHeadLua + quorumSettleLua)
	quorumTokenScript   = newScript(quorumHeadLua + quorumTokenLua)
	quorumReleaseScript = newScript(quorumHeadLua + quorumReleaseLua)
	quorumInspectScript = newScript(quorumHeadLua + quorumInspectLua)
	quorumExtendScript  = newScript(quorumExtendLua)
	quorumBeginScript   = newScript(quorumBeginLua)
)

// script is a Lua program that the server keeps under its SHA-1.
type script struct {
	source, sha string
}

func newScript(source string) *script {
	sum := sha1.Sum([]byte(source))
	return &script{source: source, sha: hex.EncodeToString(sum[:])}
}
