//go:build unix

package supervise

import "encoding/binary"

// op is the kind of a frame.
type op byte

// Frames from the caller to the shim, and then from the shim to the caller.
const (
	opSchedule  op = iota + 1 // a: when to send SIGTERM, b: when SIGKILL
	opStart                   // a: Spec.Leftover, b: 1 to hand the terminal over
	opSignal                  // a: the signal
	opStarted                 // a: process id of the command
	opFailed                  // a: errno of the failed start
	opTooLate                 // the schedule left no time to start
	opStopped                 // a: the signal that stopped the command
	opEnding                  // SIGTERM has been sent because of the schedule
	opExited                  // a: wait status of the command
	opLeftovers               // processes that were left got SIGTERM
	opStuck                   // a: process that cannot be killed, b: errno
	opDone                    // no process is left
)

// frameLen is the length of a frame on the wire.
const frameLen = 1 + 8 + 8

// frame is a message between caller and shim.
type frame struct {
	op   op
	a, b int64
}

func (f frame) append(b []byte) []byte {
	b = append(b, byte(f.op))
	b = binary.NativeEndian.AppendUint64(b, uint64(f.a))
	return binary.NativeEndian.AppendUint64(b, uint64(f.b))
}

// parseFrame reads a frame from the first frameLen bytes of b.
func parseFrame(b []byte) frame {
	return frame{
		op: op(b[0]),
		a:  int64(binary.NativeEndian.Uint64(b[1:])),
		b:  int64(binary.NativeEndian.Uint64(b[9:])),
	}
}
