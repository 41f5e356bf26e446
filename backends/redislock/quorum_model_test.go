package redislock

import (
	"fmt"
	"testing"
)

// The model of the quorum: three nodes, two clients that acquire the key
// again and again, and messages that arrive in any order, get lost, or lose their answers.
// A node that is down, slow, or restarted with its data is one whose messages
// get lost. The clocks of the nodes differ and stand still, which is the worst
// that they can do; the numbers that clients propose differ too. All
// interleavings are tried.

const (
	modelNodes    = 3
	modelMajority = 2
	modelClients  = 2
)

// modelRounds is how often each client acquires the key.
var modelRounds = [modelClients]int8{2, 1}

type modelPhase uint8

const (
	modelAsking modelPhase = iota
	modelAgreeing
	modelHolding
	modelLeaving // gives back what nodes have granted
	modelDone
)

// modelNode is the record of the key on a node.
type modelNode struct {
	last, token int8
	holder      int8 // client+1, or 0
}

type modelClient struct {
	phase   modelPhase
	asked   uint8 // nodes, as bits
	granted uint8
	agreed  uint8
	tokens  [modelNodes]int8
	token   int8
	rounds  int8
}

// modelState is a moment. It is comparable, so that none is looked at twice.
type modelState struct {
	nodes   [modelNodes]modelNode
	clients [modelClients]modelClient
	highest int8 // token that was handed out
}

// modelRules are the rules that a broken quorum breaks.
type modelRules struct {
	noWriteBack bool // hand out the largest token without writing it back
	minority    bool // one node is enough
	ownToken    bool // hand out the token of the first node
}

type modelRun struct {
	rules  modelRules
	seen   map[modelState]struct{}
	fault  string
	grants int
}

func (r *modelRun) fail(format string, args ...any) {
	if r.fault == "" {
		r.fault = fmt.Sprintf(format, args...)
	}
}

// visit tries everything that can come next.
func (r *modelRun) visit(s modelState) {
	if _, ok := r.seen[s]; ok || r.fault != "" {
		return
	}
	r.seen[s] = struct{}{}
	for c := range s.clients {
		r.step(s, c)
	}
}

func (r *modelRun) step(s modelState, c int) {
	me := &s.clients[c]
	switch me.phase {
	case modelAsking:
		r.ask(s, c)
	case modelAgreeing:
		r.agree(s, c)
	case modelHolding:
		next := s
		next.clients[c].phase, next.clients[c].asked = modelLeaving, 0
		r.visit(next)
	case modelLeaving:
		r.leave(s, c)
	}
}

// clock is what a node's clock shows, and wanted what a client proposes.
func modelClock(node int) int8 { return []int8{1, 6, 3}[node] }

func modelWanted(c int) int8 { return []int8{4, 0}[c] }

// ask has one node asked that was not asked yet.
func (r *modelRun) ask(s modelState, c int) {
	me := s.clients[c]
	for n := range s.nodes {
		bit := uint8(1) << n
		if me.asked&bit != 0 {
			continue
		}
		lost := s
		lost.clients[c].asked |= bit
		r.decide(lost, c)

		next := s
		next.clients[c].asked |= bit
		node := &next.nodes[n]
		if node.holder == 0 {
			token := max(modelClock(n), node.last+1)
			if w := modelWanted(c); w > node.last {
				token = w
			}
			node.last, node.token, node.holder = token, token, int8(c+1)
			unheard := next
			r.decide(unheard, c) // the answer got lost
			next.clients[c].granted |= bit
			next.clients[c].tokens[n] = token
		}
		r.decide(next, c)
	}
}

// decide goes on when a majority has granted, or when nobody is left to ask.
func (r *modelRun) decide(s modelState, c int) {
	me := &s.clients[c]
	need := modelMajority
	if r.rules.minority {
		need = 1
	}
	if ones(me.granted) >= need {
		me.phase, me.agreed, me.token = modelAgreeing, 0, 0
		for n, t := range me.tokens {
			if me.granted&(1<<n) != 0 && (t > me.token && !r.rules.ownToken || me.token == 0) {
				me.token = t
			}
		}
		for n, t := range me.tokens {
			if me.granted&(1<<n) != 0 && t == me.token {
				me.agreed |= 1 << n
			}
		}
		me.asked = 0
		r.handOut(s, c, need)
		return
	}
	if me.asked == 1<<modelNodes-1 {
		me.phase, me.asked = modelLeaving, 0
	}
	r.visit(s)
}

// handOut hands the lock out if enough nodes have its token.
func (r *modelRun) handOut(s modelState, c, need int) {
	me := &s.clients[c]
	if ones(me.agreed) < need && !r.rules.noWriteBack && !r.rules.ownToken {
		r.visit(s)
		return
	}
	for other := range s.clients {
		if other != c && s.clients[other].phase == modelHolding {
			r.fail("clients %d and %d hold the key together: %+v", c, other, s)
		}
	}
	if me.token <= s.highest {
		r.fail("token %d was handed out after %d: %+v", me.token, s.highest, s)
	}
	r.grants++
	s.highest = me.token
	me.phase = modelHolding
	r.visit(s)
}

// agree has the token written back to one node.
func (r *modelRun) agree(s modelState, c int) {
	me := s.clients[c]
	for n := range s.nodes {
		bit := uint8(1) << n
		if me.granted&bit == 0 || me.agreed&bit != 0 || me.asked&bit != 0 {
			continue
		}
		next := s
		next.clients[c].asked |= bit
		if node := &next.nodes[n]; node.holder == int8(c+1) {
			node.token = me.token
			node.last = max(node.last, me.token)
			unheard := next
			r.visit(unheard)
			next.clients[c].agreed |= bit
		}
		r.handOut(next, c, modelMajority)
	}
	// It can also give up at any time.
	next := s
	next.clients[c].phase, next.clients[c].asked = modelLeaving, 0
	r.visit(next)
}

// leave has one node free the key of what the client has there. It may be lost:
// then the grant there ends with its time, which is any time from now on.
func (r *modelRun) leave(s modelState, c int) {
	me := s.clients[c]
	for n := range s.nodes {
		bit := uint8(1) << n
		if me.asked&bit != 0 {
			continue
		}
		next := s
		next.clients[c].asked |= bit
		if node := &next.nodes[n]; node.holder == int8(c+1) {
			node.holder = 0
		}
		if next.clients[c].asked == 1<<modelNodes-1 {
			rounds := next.clients[c].rounds + 1
			next.clients[c] = modelClient{rounds: rounds}
			if rounds == modelRounds[c] {
				next.clients[c].phase = modelDone
			}
		}
		r.visit(next)
	}
}

func ones(bits uint8) int {
	n := 0
	for ; bits != 0; bits &= bits - 1 {
		n++
	}
	return n
}

func TestQuorumModel(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		rules  modelRules
		broken bool
	}{
		{"as it is", modelRules{}, false},
		{"no write-back", modelRules{noWriteBack: true}, true},
		{"the token of one node", modelRules{ownToken: true}, true},
		{"a minority is enough", modelRules{minority: true}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := &modelRun{rules: c.rules, seen: make(map[modelState]struct{})}
			r.visit(modelState{})
			t.Logf("%d states, %d grants: %s", len(r.seen), r.grants, r.fault)
			if (r.fault != "") != c.broken {
				t.Errorf("fault %q, want one: %v", r.fault, c.broken)
			}
			if r.grants == 0 {
				t.Error("nothing was granted")
			}
		})
	}
}
