-- Schema of package pglock, version 3. It may be run again, and over earlier versions.
--
-- What the tables mean:
--
--   keys      one row for each key that is or was in use. Whoever works on a key
--             locks its row first. The row outlives the lock until "stays", for
--             the sake of "last", the number given out last as token or ticket.
--             A lock with one exclusive holder has it in the row itself; if
--             "many" is true, the holders are in "holds", and mode and permits
--             are what they agree on. "waiting" says that there may be tickets,
--             none of them below "head".
--   holds     the holders of shared locks and of locks with several permits
--   tickets   who waits, in the order of the ticket numbers. A ticket lapses when
--             it expires, and keeps its place until it dies.
--   meta      the version, and the largest number of the keys that were swept
--
-- All times and durations are in microseconds, all instants by the server's clock,
-- which may be set: what then seems to last longer than it can is cut.
--
-- The functions work under READ COMMITTED only, where each statement sees what
-- was committed before it began. They refuse anything else with DL001.

DO $$ BEGIN
	IF to_regnamespace('dlm') IS NULL THEN
		CREATE SCHEMA dlm;
	END IF;
END $$;

CREATE TABLE IF NOT EXISTS dlm.meta (
	id      int    PRIMARY KEY CHECK (id = 1),
	version int    NOT NULL,
	floor   bigint NOT NULL
);

CREATE TABLE IF NOT EXISTS dlm.keys (
	key     bytea    PRIMARY KEY,
	last    bigint   NOT NULL,
	head    bigint   NOT NULL,
	stays   bigint   NOT NULL,
	waiting boolean  NOT NULL,
	many    boolean  NOT NULL,
	mode    smallint NOT NULL,
	permits int      NOT NULL,
	owner   bytea,
	token   bigint   NOT NULL,
	ttl     bigint   NOT NULL,
	since   bigint   NOT NULL,
	expires bigint   NOT NULL,
	manager text     NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX IF NOT EXISTS keys_stays ON dlm.keys (stays);

CREATE TABLE IF NOT EXISTS dlm.holds (
	key     bytea  NOT NULL,
	owner   bytea  NOT NULL,
	token   bigint NOT NULL,
	ttl     bigint NOT NULL,
	since   bigint NOT NULL,
	expires bigint NOT NULL,
	manager text   NOT NULL,
	PRIMARY KEY (key, owner)
);
CREATE INDEX IF NOT EXISTS holds_expires ON dlm.holds (expires);

CREATE TABLE IF NOT EXISTS dlm.tickets (
	key     bytea    NOT NULL,
	ticket  bigint   NOT NULL,
	owner   bytea    NOT NULL,
	mode    smallint NOT NULL,
	permits int      NOT NULL,
	ttl     bigint   NOT NULL,
	since   bigint   NOT NULL,
	life    bigint   NOT NULL,
	expires bigint   NOT NULL,
	dies    bigint   NOT NULL,
	manager text     NOT NULL,
	PRIMARY KEY (key, ticket)
);
CREATE UNIQUE INDEX IF NOT EXISTS tickets_owner ON dlm.tickets (key, owner);
CREATE INDEX IF NOT EXISTS tickets_dies ON dlm.tickets (dies);

-- The next number of a key. The clock makes numbers rise even if writes were
-- lost; the counter does so whatever the clock says. 2^52 bounds a clock that is
-- far off.
CREATE OR REPLACE FUNCTION dlm.number_v1(last bigint, t bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
	SELECT greatest(last + 1, least(t, 4503599627370496))
$$;

-- Until when a key's row stays that is needed until then: seldom another value,
-- so that the index need not change.
CREATE OR REPLACE FUNCTION dlm.stays_v1(stays bigint, t bigint, need bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
	SELECT CASE WHEN stays >= t + need AND stays <= t + 2 * need THEN stays ELSE t + need + need / 8 END
$$;

-- Tells a manager. Without a name nobody listens; what is too long for a
-- notification is found by looking.
CREATE OR REPLACE FUNCTION dlm.tell_v1(
	manager text, what text, ticket bigint, token bigint, ttl bigint, mode int, owner bytea, key bytea
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF manager <> '' AND length(owner) + length(key) < 3500 THEN
		PERFORM pg_notify(manager,
			concat_ws(' ', what, ticket, token, ttl, mode, encode(owner, 'hex'), encode(key, 'hex')));
	END IF;
END $$;

-- Drops what has expired of the holders of a key whose row is locked.
CREATE OR REPLACE FUNCTION dlm.open_v1(INOUT k dlm.keys, t bigint) LANGUAGE plpgsql AS $$
BEGIN
	IF k.owner IS NOT NULL THEN
		IF k.expires <= t THEN
			k.owner := NULL;
		ELSIF k.expires - t > k.ttl THEN
			k.expires := t + k.ttl;
		END IF;
	END IF;
	IF k.many THEN
		DELETE FROM dlm.holds h WHERE h.key = k.key AND h.expires <= t;
		UPDATE dlm.holds h SET expires = t + h.ttl WHERE h.key = k.key AND h.expires - t > h.ttl;
		k.many := EXISTS (SELECT FROM dlm.holds h WHERE h.key = k.key);
	END IF;
END $$;

CREATE OR REPLACE FUNCTION dlm.admits_v1(k dlm.keys, mode int, permits int) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
	IF k.owner IS NOT NULL THEN
		RETURN false;
	ELSIF NOT k.many THEN
		RETURN true;
	ELSIF mode = 1 THEN
		RETURN k.mode = 1;
	END IF;
	RETURN k.mode = 0 AND permits > (SELECT count(*) FROM dlm.holds h WHERE h.key = k.key);
END $$;

-- Makes a grant; its token is k.last.
CREATE OR REPLACE FUNCTION dlm.grant_v1(
	INOUT k dlm.keys, owner bytea, mode int, permits int, ttl bigint, manager text, t bigint, ends bigint
) LANGUAGE plpgsql AS $$
BEGIN
	k.last := dlm.number_v1(k.last, t);
	k.mode := mode;
	k.permits := permits;
	IF mode = 0 AND permits = 1 THEN
		k.owner := owner;
		k.token := k.last;
		k.ttl := ttl;
		k.since := t;
		k.expires := ends;
		k.manager := manager;
	ELSE
		k.many := true;
		INSERT INTO dlm.holds VALUES (k.key, owner, k.last, ttl, t, ends, manager);
	END IF;
END $$;

-- Grants the key to the head of the queue for as long as it can. The caller, if
-- any, gets its whole TTL and no message. A grant to another lapses with its
-- ticket unless the owner confirms it.
CREATE OR REPLACE FUNCTION dlm.serve_v1(INOUT k dlm.keys, t bigint, caller bytea) LANGUAGE plpgsql AS $$
DECLARE
	x     dlm.tickets;
	place bigint := k.head;
	left_ boolean := false; -- a ticket is left, so that the head is known
BEGIN
	WHILE k.waiting LOOP
		SELECT * INTO x FROM dlm.tickets s WHERE s.key = k.key AND s.ticket >= place ORDER BY s.ticket LIMIT 1;
		IF NOT FOUND THEN
			k.waiting := left_;
			EXIT;
		END IF;
		place := x.ticket + 1;
		IF x.expires - t > x.life THEN
			x.expires := t + x.life;
			x.dies := x.expires + x.life;
			UPDATE dlm.tickets s SET expires = x.expires, dies = x.dies WHERE s.key = k.key AND s.ticket = x.ticket;
		END IF;
		IF x.dies <= t THEN
			DELETE FROM dlm.tickets s WHERE s.key = k.key AND s.ticket = x.ticket;
			CONTINUE;
		END IF;
		IF x.expires > t AND dlm.admits_v1(k, x.mode, x.permits) THEN
			DELETE FROM dlm.tickets s WHERE s.key = k.key AND s.ticket = x.ticket;
			k := dlm.grant_v1(k, x.owner, x.mode, x.permits, x.ttl, x.manager, t,
				CASE WHEN x.owner = caller THEN t + x.ttl ELSE least(t + x.ttl, x.expires) END);
			IF caller IS NULL OR x.owner <> caller THEN
				PERFORM dlm.tell_v1(x.manager, 'g', x.ticket, k.last, x.ttl, x.mode, x.owner, k.key);
			END IF;
			CONTINUE;
		END IF;
		IF NOT left_ THEN
			left_ := true;
			k.head := x.ticket;
		END IF;
		EXIT WHEN x.expires > t;
	END LOOP;
END $$;

-- Writes what was changed.
CREATE OR REPLACE FUNCTION dlm.save_v1(before dlm.keys, k dlm.keys, t bigint, kept bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	ends bigint := t;
BEGIN
	IF k.owner IS NOT NULL THEN
		ends := k.expires;
	ELSIF k.many THEN
		SELECT max(h.expires) INTO ends FROM dlm.holds h WHERE h.key = k.key;
	END IF;
	k.stays := dlm.stays_v1(k.stays, t, greatest(ends - t, 0) + kept);
	IF k IS DISTINCT FROM before THEN
		UPDATE dlm.keys x SET
			last = k.last, head = k.head, stays = k.stays, waiting = k.waiting, many = k.many, mode = k.mode,
			permits = k.permits, owner = k.owner, token = k.token, ttl = k.ttl, since = k.since,
			expires = k.expires, manager = k.manager
		WHERE x.key = k.key;
	END IF;
END $$;

-- Deletes a few records of whatever key that nobody needs any more. It waits for
-- nobody. The numbers that keys had reached go into meta.floor, above which a
-- key begins that comes anew. Called with portion 20 for a tenth of the new keys,
-- it deletes twice as many as come.
CREATE OR REPLACE FUNCTION dlm.sweep_v1(portion int) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
	t bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
BEGIN
	DELETE FROM dlm.tickets WHERE ctid = ANY (ARRAY(
		SELECT s.ctid FROM dlm.tickets s WHERE s.dies <= t ORDER BY s.dies LIMIT portion FOR UPDATE SKIP LOCKED));
	DELETE FROM dlm.holds WHERE ctid = ANY (ARRAY(
		SELECT h.ctid FROM dlm.holds h WHERE h.expires <= t ORDER BY h.expires LIMIT portion FOR UPDATE SKIP LOCKED));
	IF NOT EXISTS (SELECT FROM dlm.keys k WHERE k.stays <= t) THEN
		RETURN;
	END IF;
	PERFORM FROM dlm.meta m WHERE m.id = 1 FOR UPDATE SKIP LOCKED;
	IF FOUND THEN
		WITH gone AS (
			DELETE FROM dlm.keys WHERE key = ANY (ARRAY(
				SELECT k.key FROM dlm.keys k
				WHERE k.stays <= t AND NOT EXISTS (SELECT FROM dlm.tickets s WHERE s.key = k.key)
					AND NOT EXISTS (SELECT FROM dlm.holds h WHERE h.key = k.key)
				ORDER BY k.stays LIMIT portion FOR UPDATE OF k SKIP LOCKED))
			RETURNING last)
		UPDATE dlm.meta m SET floor = greatest(m.floor, (SELECT max(last) FROM gone))
		WHERE m.id = 1 AND EXISTS (SELECT FROM gone);
	END IF;
END $$;

CREATE OR REPLACE FUNCTION dlm.isolation_v1() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('transaction_isolation') <> 'read committed' THEN
		RAISE EXCEPTION 'dlm: transaction isolation is %, must be read committed', current_setting('transaction_isolation')
			USING ERRCODE = 'DL001';
	END IF;
END $$;

-- What acquire_v1 does if the key is not simply free.
CREATE OR REPLACE FUNCTION dlm.acquire_slow_v1(
	p_key bytea, p_owner bytea, p_ttl bigint, p_manager text, p_mode int, p_permits int, p_life bigint, p_kept bigint,
	OUT status int, OUT number bigint, OUT holder bytea, OUT remaining bigint, OUT place bigint, OUT ticket bigint
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
	k       dlm.keys;
	before  dlm.keys;
	h       dlm.holds;
	mine    dlm.tickets;
	t       bigint;
	have    int;
	fresh   boolean := false;
	blocked boolean := false;
BEGIN
	LOOP
		SELECT * INTO k FROM dlm.keys x WHERE x.key = p_key FOR UPDATE;
		EXIT WHEN FOUND;
		INSERT INTO dlm.keys VALUES (p_key, 0, 0, 0, false, false, 0, 1, NULL, 0, 0, 0, 0, '')
		ON CONFLICT DO NOTHING RETURNING * INTO k;
		IF FOUND THEN
			-- A sweep that deleted the key has ended by now.
			fresh := true;
			SELECT m.floor INTO k.last FROM dlm.meta m WHERE m.id = 1;
			EXIT;
		END IF;
	END LOOP;
	before := k;
	IF fresh THEN
		before.last := NULL; -- write it in any case
	END IF;
	t := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
	k := dlm.open_v1(k, t);

	-- A grant that is repeated counts as renewed.
	IF k.owner = p_owner THEN
		IF p_mode <> 0 OR p_permits <> 1 THEN
			status := 4;
			RETURN;
		END IF;
		IF t + p_ttl > k.expires THEN
			k.expires := t + p_ttl;
			k.ttl := p_ttl;
		END IF;
		k.manager := p_manager;
		PERFORM dlm.save_v1(before, k, t, p_kept);
		status := 1;
		number := k.token;
		RETURN;
	ELSIF k.many THEN
		SELECT * INTO h FROM dlm.holds x WHERE x.key = p_key AND x.owner = p_owner FOR UPDATE;
		IF FOUND THEN
			IF k.mode <> p_mode OR k.permits <> p_permits THEN
				status := 4;
				RETURN;
			END IF;
			IF t + p_ttl > h.expires THEN
				h.expires := t + p_ttl;
				h.ttl := p_ttl;
			END IF;
			UPDATE dlm.holds x SET expires = h.expires, ttl = h.ttl, manager = p_manager
			WHERE x.key = p_key AND x.owner = p_owner;
			k := dlm.serve_v1(k, t, NULL);
			PERFORM dlm.save_v1(before, k, t, p_kept);
			status := 1;
			number := h.token;
			RETURN;
		END IF;
	END IF;

	-- All who use the key at the same time must agree on its limit.
	IF k.owner IS NOT NULL THEN
		have := 1;
	ELSIF k.many THEN
		have := k.permits;
	ELSIF k.waiting THEN
		SELECT x.permits INTO have FROM dlm.tickets x
		WHERE x.key = p_key AND x.ticket >= k.head AND x.owner <> p_owner AND x.expires > t ORDER BY x.ticket LIMIT 1;
	END IF;
	IF have <> p_permits THEN
		PERFORM dlm.save_v1(before, k, t, p_kept);
		status := 3;
		number := have;
		RETURN;
	END IF;

	IF k.waiting THEN
		SELECT * INTO mine FROM dlm.tickets x WHERE x.key = p_key AND x.owner = p_owner FOR UPDATE;
		IF mine.dies <= t THEN
			DELETE FROM dlm.tickets x WHERE x.key = p_key AND x.ticket = mine.ticket;
			mine := NULL;
		ELSIF mine.ticket IS NOT NULL AND p_life > 0 THEN
			mine.expires := t + p_life;
			UPDATE dlm.tickets x SET
				mode = p_mode, permits = p_permits, ttl = p_ttl, life = p_life, expires = t + p_life, dies = t + 2 * p_life,
				manager = p_manager
			WHERE x.key = p_key AND x.ticket = mine.ticket;
		END IF;
		k := dlm.serve_v1(k, t, p_owner);
		IF mine.ticket IS NOT NULL THEN
			IF k.owner = p_owner THEN
				number := k.token;
			ELSIF k.many THEN
				SELECT x.token INTO number FROM dlm.holds x WHERE x.key = p_key AND x.owner = p_owner;
			END IF;
		ELSIF k.waiting THEN
			blocked := EXISTS (SELECT FROM dlm.tickets x WHERE x.key = p_key AND x.ticket >= k.head AND x.expires > t);
		END IF;
	END IF;
	IF number IS NULL AND mine.ticket IS NULL AND NOT blocked AND dlm.admits_v1(k, p_mode, p_permits) THEN
		k := dlm.grant_v1(k, p_owner, p_mode, p_permits, p_ttl, p_manager, t, t + p_ttl);
		number := k.last;
	END IF;
	IF number IS NOT NULL THEN
		status := 1;
	ELSE
		status := 2;
		number := 0;
		place := 0;
		IF mine.ticket IS NULL AND p_life > 0 THEN
			k.last := dlm.number_v1(k.last, t);
			mine.ticket := k.last;
			mine.expires := t + p_life;
			INSERT INTO dlm.tickets VALUES
				(p_key, k.last, p_owner, p_mode, p_permits, p_ttl, t, p_life, t + p_life, t + 2 * p_life, p_manager);
			IF NOT k.waiting THEN
				k.waiting := true;
				k.head := k.last;
			END IF;
		END IF;
		ticket := mine.ticket;
		IF ticket IS NOT NULL THEN
			SELECT count(*) INTO place FROM dlm.tickets x
			WHERE x.key = p_key AND x.ticket >= k.head AND x.ticket < mine.ticket AND x.expires > t;
			IF mine.expires > t THEN
				place := place + 1;
			END IF;
		END IF;
		IF k.owner IS NOT NULL THEN
			holder := k.owner;
			number := k.token;
			remaining := k.expires - t;
		ELSIF k.many THEN
			SELECT x.owner, x.token INTO holder, number FROM dlm.holds x WHERE x.key = p_key ORDER BY x.token LIMIT 1;
			SELECT min(x.expires) - t INTO remaining FROM dlm.holds x WHERE x.key = p_key;
		END IF;
	END IF;
	PERFORM dlm.save_v1(before, k, t, p_kept);
	IF random() < (CASE WHEN fresh THEN 0.1 ELSE 0.05 END) THEN
		PERFORM dlm.sweep_v1(20);
	END IF;
END $$;

-- Grants the key, or refuses, and if p_life is not 0 gives or refreshes a ticket.
-- The status is 1 if granted, with the token in number; 2 if refused, with the
-- token of a holder, if any; 3 if the key is in use with the limit in number; 4
-- if the owner holds the key in another mode or with another limit.
CREATE OR REPLACE FUNCTION dlm.acquire_v1(
	p_key bytea, p_owner bytea, p_ttl bigint, p_manager text, p_mode int, p_permits int, p_life bigint, p_kept bigint,
	OUT status int, OUT number bigint, OUT holder bytea, OUT remaining bigint, OUT place bigint, OUT ticket bigint
) LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
	t     bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
	floor bigint;
	k     dlm.keys;
	made  bigint;
BEGIN
	IF current_setting('transaction_isolation') <> 'read committed' THEN
		PERFORM dlm.isolation_v1();
	END IF;
	-- Almost always: nobody holds the key and nobody waits for it.
	IF p_mode = 0 AND p_permits = 1 THEN
		UPDATE dlm.keys x SET
			last = dlm.number_v1(x.last, t), token = dlm.number_v1(x.last, t),
			stays = dlm.stays_v1(x.stays, t, p_ttl + p_kept), mode = 0, permits = 1, owner = p_owner, ttl = p_ttl,
			since = t, expires = t + p_ttl, manager = p_manager
		WHERE x.key = p_key AND NOT x.waiting AND NOT x.many AND (x.owner IS NULL OR x.expires <= t)
		RETURNING x.token INTO number;
		IF FOUND THEN
			status := 1;
			RETURN;
		END IF;
		SELECT * INTO k FROM dlm.keys x WHERE x.key = p_key FOR UPDATE;
		IF NOT FOUND THEN
			number := dlm.number_v1(0, t);
			INSERT INTO dlm.keys VALUES (p_key, number, 0, dlm.stays_v1(0, t, p_ttl + p_kept), false, false, 0, 1,
				p_owner, number, p_ttl, t, t + p_ttl, p_manager)
			ON CONFLICT DO NOTHING;
			IF FOUND THEN
				status := 1;
				-- A sweep that deleted the key has ended by now, and this sees what it noted.
				SELECT m.floor INTO floor FROM dlm.meta m WHERE m.id = 1;
				IF floor >= number THEN
					number := dlm.number_v1(floor, t);
					UPDATE dlm.keys x SET last = number, token = number WHERE x.key = p_key;
				END IF;
				IF random() < 0.1 THEN
					PERFORM dlm.sweep_v1(20);
				END IF;
				RETURN;
			END IF;
		ELSIF p_life > 0 AND k.owner <> p_owner THEN
			-- Or somebody else holds it alone, and this is a new waiter.
			t := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
			IF k.expires > t AND k.expires - t <= k.ttl THEN
				made := dlm.number_v1(k.last, t);
				INSERT INTO dlm.tickets
				VALUES (p_key, made, p_owner, 0, 1, p_ttl, t, p_life, t + p_life, t + 2 * p_life, p_manager)
				ON CONFLICT DO NOTHING;
				IF FOUND THEN
					place := 1;
					IF k.waiting THEN
						SELECT count(*) + 1 INTO place FROM dlm.tickets x
						WHERE x.key = p_key AND x.ticket >= k.head AND x.ticket < made AND x.expires > t;
					ELSE
						k.head := made;
					END IF;
					UPDATE dlm.keys x SET
						last = made, head = k.head, waiting = true,
						stays = dlm.stays_v1(x.stays, t, x.expires - t + p_kept)
					WHERE x.key = p_key;
					status := 2;
					ticket := made;
					number := k.token;
					holder := k.owner;
					remaining := k.expires - t;
					IF random() < 0.05 THEN
						PERFORM dlm.sweep_v1(20);
					END IF;
					RETURN;
				END IF;
			END IF;
		END IF;
	END IF;
	SELECT * INTO status, number, holder, remaining, place, ticket
	FROM dlm.acquire_slow_v1(p_key, p_owner, p_ttl, p_manager, p_mode, p_permits, p_life, p_kept);
END $$;

CREATE OR REPLACE FUNCTION dlm.release_slow_v1(p_key bytea, p_owner bytea, p_token bigint, p_kept bigint) RETURNS int
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
	k      dlm.keys;
	before dlm.keys;
	held   bigint;
	t      bigint;
BEGIN
	SELECT * INTO k FROM dlm.keys x WHERE x.key = p_key FOR UPDATE;
	IF NOT FOUND THEN
		RETURN CASE WHEN p_token = 0 THEN 1 ELSE 0 END;
	END IF;
	before := k;
	t := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
	k := dlm.open_v1(k, t);
	IF k.owner = p_owner THEN
		held := k.token;
	ELSIF k.many THEN
		SELECT x.token INTO held FROM dlm.holds x WHERE x.key = p_key AND x.owner = p_owner;
	END IF;
	IF p_token <> 0 AND held IS DISTINCT FROM p_token THEN
		PERFORM dlm.save_v1(before, k, t, p_kept);
		RETURN CASE WHEN k.owner IS NOT NULL OR k.many THEN 2 ELSE 0 END;
	END IF;
	IF k.owner = p_owner THEN
		k.owner := NULL;
	ELSIF held IS NOT NULL THEN
		DELETE FROM dlm.holds x WHERE x.key = p_key AND x.owner = p_owner;
		k.many := EXISTS (SELECT FROM dlm.holds x WHERE x.key = p_key);
	END IF;
	IF p_token = 0 AND k.waiting THEN
		DELETE FROM dlm.tickets x WHERE x.key = p_key AND x.owner = p_owner;
	END IF;
	k := dlm.serve_v1(k, t, NULL);
	PERFORM dlm.save_v1(before, k, t, p_kept);
	RETURN 1;
END $$;

-- Gives up a grant, or with token 0 whatever the owner has, and hands the key on.
-- Returns 1, or 0 if the grant is not there, or 2 if others hold the key.
CREATE OR REPLACE FUNCTION dlm.release_v1(p_key bytea, p_owner bytea, p_token bigint, p_kept bigint) RETURNS int
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
	t    bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
	k    dlm.keys;
	next dlm.tickets;
	ends bigint;
BEGIN
	IF current_setting('transaction_isolation') <> 'read committed' THEN
		PERFORM dlm.isolation_v1();
	END IF;
	IF p_token <> 0 THEN
		UPDATE dlm.keys x SET owner = NULL, stays = dlm.stays_v1(x.stays, t, p_kept)
		WHERE x.key = p_key AND x.owner = p_owner AND x.token = p_token AND x.expires > t AND NOT x.waiting;
		IF FOUND THEN
			RETURN 1;
		END IF;
		-- Or one who waits to hold it alone is the next, and is alive.
		SELECT * INTO k FROM dlm.keys x WHERE x.key = p_key AND x.owner = p_owner AND x.token = p_token AND x.waiting FOR UPDATE;
		t := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
		IF k.expires > t THEN
			SELECT * INTO next FROM dlm.tickets s WHERE s.key = p_key AND s.ticket >= k.head ORDER BY s.ticket LIMIT 1;
			IF next.mode = 0 AND next.permits = 1 AND next.expires > t AND next.expires - t <= next.life THEN
				DELETE FROM dlm.tickets s WHERE s.key = p_key AND s.ticket = next.ticket;
				k.last := dlm.number_v1(k.last, t);
				ends := least(t + next.ttl, next.expires);
				UPDATE dlm.keys y SET
					last = k.last, token = k.last, head = next.ticket + 1, stays = dlm.stays_v1(y.stays, t, ends - t + p_kept),
					mode = 0, permits = 1, owner = next.owner, ttl = next.ttl, since = t, expires = ends, manager = next.manager
				WHERE y.key = p_key;
				PERFORM dlm.tell_v1(next.manager, 'g', next.ticket, k.last, next.ttl, 0, next.owner, p_key);
				RETURN 1;
			END IF;
		END IF;
	END IF;
	RETURN dlm.release_slow_v1(p_key, p_owner, p_token, p_kept);
END $$;

-- What calls that meet have in common: each text is a list, with commas between.
-- Those that are not simply granted, or released, are left out, and have no effect:
-- they are made again, alone. Keys that others work on are passed over, so that
-- nobody waits for them in company, except for one who makes the same key: not for
-- long, as then all are refused (55P03).

-- Grants keys that nobody holds or waits for, each to one exclusive holder. Answers
-- with the place of each in the lists, from 1 on, and its token.
--
-- New keys come first, in their order: what is waited for there is another that
-- makes the same key, and who waits holds nothing that anybody could wait for but
-- keys that it makes. What comes after that waits for nobody. So there is no circle.
CREATE OR REPLACE FUNCTION dlm.acquire_many_v1(
	p_keys text, p_owners text, p_ttls text, p_managers text, p_kept bigint, OUT place bigint, OUT token bigint
) RETURNS SETOF record LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan SET lock_timeout = '100ms' AS $$
#variable_conflict use_column
DECLARE
	t      bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
	keys   text[] := string_to_array(p_keys, ',');
	owners text[] := string_to_array(p_owners, ',');
	ttls   text[] := string_to_array(p_ttls, ',');
	names  text[] := string_to_array(p_managers, ',');
	number bigint := dlm.number_v1(0, t);
	floor  bigint;
	made   bytea[];
BEGIN
	PERFORM dlm.isolation_v1();
	WITH asked AS MATERIALIZED (
		SELECT decode(u.key, 'hex') AS key, decode(u.owner, 'hex') AS owner, u.ttl::bigint AS ttl, coalesce(u.manager, '') AS manager
		FROM unnest(keys, owners, ttls, names) AS u(key, owner, ttl, manager)),
	fresh AS (
		INSERT INTO dlm.keys
		SELECT a.key, number, 0, dlm.stays_v1(0, t, a.ttl + p_kept), false, false, 0, 1, a.owner, number, a.ttl, t, t + a.ttl, a.manager
		FROM asked a WHERE NOT EXISTS (SELECT FROM dlm.keys x WHERE x.key = a.key) ORDER BY a.key
		ON CONFLICT DO NOTHING RETURNING key)
	SELECT array_agg(f.key) INTO made FROM fresh f;
	IF made IS NOT NULL THEN
		-- Sweeps that deleted the keys have ended by now, and this sees what they noted.
		SELECT m.floor INTO floor FROM dlm.meta m WHERE m.id = 1;
		IF floor >= number THEN
			number := dlm.number_v1(floor, t);
			UPDATE dlm.keys x SET last = number, token = number WHERE x.key = ANY (made);
		END IF;
		RETURN QUERY
		SELECT u.place, x.token
		FROM unnest(keys, owners) WITH ORDINALITY AS u(key, owner, place)
		JOIN dlm.keys x ON x.key = decode(u.key, 'hex') AND x.owner = decode(u.owner, 'hex')
		WHERE x.key = ANY (made);
		IF random() < 0.1 * cardinality(made) THEN
			PERFORM dlm.sweep_v1(greatest(20, 2 * cardinality(made)));
		END IF;
		IF cardinality(made) = cardinality(keys) THEN
			RETURN;
		END IF;
	END IF;
	RETURN QUERY
	WITH asked AS MATERIALIZED (
		SELECT decode(u.key, 'hex') AS key, decode(u.owner, 'hex') AS owner, u.ttl::bigint AS ttl, coalesce(u.manager, '') AS manager, u.place
		FROM unnest(keys, owners, ttls, names) WITH ORDINALITY AS u(key, owner, ttl, manager, place)),
	free AS MATERIALIZED (
		SELECT a.* FROM asked a JOIN dlm.keys x ON x.key = a.key
		WHERE NOT x.waiting AND NOT x.many AND (x.owner IS NULL OR x.expires <= t)
		FOR UPDATE OF x SKIP LOCKED)
	UPDATE dlm.keys x SET
		last = dlm.number_v1(x.last, t), token = dlm.number_v1(x.last, t),
		stays = dlm.stays_v1(x.stays, t, f.ttl + p_kept), mode = 0, permits = 1, owner = f.owner, ttl = f.ttl,
		since = t, expires = t + f.ttl, manager = f.manager
	FROM free f WHERE x.key = f.key
	RETURNING f.place, x.token;
END $$;

-- Gives up grants of keys that nobody waits for. Answers with the place of each.
CREATE OR REPLACE FUNCTION dlm.release_many_v1(p_keys text, p_owners text, p_tokens text, p_kept bigint) RETURNS SETOF bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
	t bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
BEGIN
	PERFORM dlm.isolation_v1();
	RETURN QUERY
	WITH asked AS MATERIALIZED (
		SELECT decode(u.key, 'hex') AS key, decode(u.owner, 'hex') AS owner, u.token::bigint AS token, u.place
		FROM unnest(string_to_array(p_keys, ','), string_to_array(p_owners, ','), string_to_array(p_tokens, ','))
			WITH ORDINALITY AS u(key, owner, token, place)),
	held AS MATERIALIZED (
		SELECT x.key, a.place FROM asked a JOIN dlm.keys x ON x.key = a.key AND x.owner = a.owner AND x.token = a.token
		WHERE x.expires > t AND NOT x.waiting
		FOR UPDATE OF x SKIP LOCKED)
	UPDATE dlm.keys x SET owner = NULL, stays = dlm.stays_v1(x.stays, t, p_kept)
	FROM held h WHERE x.key = h.key
	RETURNING h.place;
END $$;

-- Renews grants, in the order of their keys, so that two batches do not wait for
-- each other. Answers for each, in the order given: 1, or 0 if it is not there,
-- or 2 if others hold the key.
CREATE OR REPLACE FUNCTION dlm.extend_v1(
	p_keys text[], p_owners text[], p_tokens text[], p_ttls text[], p_kept bigint
) RETURNS int[] LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
	r       record;
	k       dlm.keys;
	t       bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
	answers int[] := array_fill(0, ARRAY[cardinality(p_keys)]);
BEGIN
	PERFORM dlm.isolation_v1();
	FOR r IN
		SELECT decode(u.key, 'hex') AS key, decode(u.owner, 'hex') AS owner, u.token::bigint AS token, u.ttl::bigint AS ttl, u.n
		FROM unnest(p_keys, p_owners, p_tokens, p_ttls) WITH ORDINALITY AS u(key, owner, token, ttl, n) ORDER BY 1, 5
	LOOP
		UPDATE dlm.keys x SET
			ttl = CASE WHEN t + r.ttl >= least(x.expires, t + x.ttl) THEN r.ttl ELSE x.ttl END,
			expires = greatest(t + r.ttl, least(x.expires, t + x.ttl)),
			stays = dlm.stays_v1(x.stays, t, greatest(r.ttl, least(x.expires - t, x.ttl)) + p_kept)
		WHERE x.key = r.key AND x.owner = r.owner AND x.token = r.token AND x.expires > t;
		IF FOUND THEN
			answers[r.n] := 1;
			CONTINUE;
		END IF;
		SELECT * INTO k FROM dlm.keys x WHERE x.key = r.key FOR UPDATE;
		IF NOT FOUND THEN
			CONTINUE;
		ELSIF k.owner IS NOT NULL AND k.expires > t THEN
			answers[r.n] := 2;
		ELSIF k.many THEN
			UPDATE dlm.holds x SET
				ttl = CASE WHEN t + r.ttl >= least(x.expires, t + x.ttl) THEN r.ttl ELSE x.ttl END,
				expires = greatest(t + r.ttl, least(x.expires, t + x.ttl))
			WHERE x.key = r.key AND x.owner = r.owner AND x.token = r.token AND x.expires > t;
			IF FOUND THEN
				answers[r.n] := 1;
				PERFORM dlm.save_v1(k, k, t, p_kept);
			ELSIF EXISTS (SELECT FROM dlm.holds x WHERE x.key = r.key AND x.expires > t) THEN
				answers[r.n] := 2;
			END IF;
		END IF;
	END LOOP;
	RETURN answers;
END $$;

-- Removes the grant with a token, or all if it is 0, and hands the key on.
CREATE OR REPLACE FUNCTION dlm.force_v1(p_key bytea, p_token bigint, p_kept bigint)
RETURNS TABLE (owner bytea, token bigint, mode int, ttl bigint, held bigint, remaining bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
	k      dlm.keys;
	before dlm.keys;
	h      dlm.holds;
	t      bigint;
BEGIN
	PERFORM dlm.isolation_v1();
	SELECT * INTO k FROM dlm.keys x WHERE x.key = p_key FOR UPDATE;
	IF NOT FOUND THEN
		RETURN;
	END IF;
	before := k;
	t := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
	k := dlm.open_v1(k, t);
	IF k.owner IS NOT NULL AND (p_token = 0 OR k.token = p_token) THEN
		RETURN QUERY SELECT k.owner, k.token, 0, k.ttl, t - k.since, k.expires - t;
		PERFORM dlm.tell_v1(k.manager, 'l', 0, k.token, k.ttl, 0, k.owner, p_key);
		k.owner := NULL;
	END IF;
	IF k.many THEN
		FOR h IN SELECT * FROM dlm.holds x WHERE x.key = p_key AND (p_token = 0 OR x.token = p_token) ORDER BY x.token LOOP
			RETURN QUERY SELECT h.owner, h.token, k.mode::int, h.ttl, t - h.since, h.expires - t;
			PERFORM dlm.tell_v1(h.manager, 'l', 0, h.token, h.ttl, k.mode, h.owner, p_key);
			DELETE FROM dlm.holds x WHERE x.key = p_key AND x.owner = h.owner;
		END LOOP;
		k.many := EXISTS (SELECT FROM dlm.holds x WHERE x.key = p_key);
	END IF;
	k := dlm.serve_v1(k, t, NULL);
	PERFORM dlm.save_v1(before, k, t, p_kept);
END $$;

-- Lists who holds ('h') and who waits for ('w') up to p_limit keys that are in
-- use, from p_from on, before p_to, if that is not NULL, and after p_after.
CREATE OR REPLACE FUNCTION dlm.list_v1(p_from bytea, p_to bytea, p_after bytea, p_limit bigint)
RETURNS TABLE (
	key bytea, what text, number bigint, owner bytea, mode int, permits int, ttl bigint, age bigint, remaining bigint
) LANGUAGE plpgsql STABLE SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
	t bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
BEGIN
	RETURN QUERY
	WITH used AS (
		SELECT x.* FROM dlm.keys x
		WHERE x.key >= p_from AND (p_to IS NULL OR x.key < p_to) AND x.key > p_after AND (
			x.owner IS NOT NULL AND x.expires > t
			OR x.many AND EXISTS (SELECT FROM dlm.holds h WHERE h.key = x.key AND h.expires > t)
			OR x.waiting AND EXISTS (SELECT FROM dlm.tickets s WHERE s.key = x.key AND s.expires > t))
		ORDER BY x.key LIMIT p_limit)
	SELECT x.key, 'h', x.token, x.owner, x.mode::int, x.permits, x.ttl, t - x.since, least(x.expires - t, x.ttl)
	FROM used x WHERE x.owner IS NOT NULL AND x.expires > t
	UNION ALL
	SELECT x.key, 'h', h.token, h.owner, x.mode::int, x.permits, h.ttl, t - h.since, least(h.expires - t, h.ttl)
	FROM used x JOIN dlm.holds h ON h.key = x.key WHERE x.many AND h.expires > t
	UNION ALL
	SELECT s.key, 'w', s.ticket, s.owner, s.mode::int, s.permits, s.ttl, t - s.since, least(s.expires - t, s.life)
	FROM used x JOIN dlm.tickets s ON s.key = x.key WHERE x.waiting AND s.expires > t
	ORDER BY 1, 2, 3;
END $$;

-- Advisory mode. A key's lock is the advisory lock of its number, a hash of the
-- key, and belongs to the session of a backend. The tables say who has it and who
-- waits; nothing rests on them but the order of the queue.
--
--   adv_holds    who holds a key. A row without its lock is of no account, and is
--                deleted by the next holder.
--   adv_tickets  who waits, in the order of the ticket numbers
--   adv_numbers  tokens and ticket numbers
--
-- A session has a number of its own, and the advisory lock of that number for as
-- long as it lives. What belongs to a session whose number can be locked is dead.
-- A crash of the server empties both tables, as it ends all sessions.

CREATE SEQUENCE IF NOT EXISTS dlm.adv_numbers MAXVALUE 9007199254740991;

CREATE UNLOGGED TABLE IF NOT EXISTS dlm.adv_holds (
	number  bigint   NOT NULL,
	token   bigint   NOT NULL,
	key     bytea    NOT NULL,
	owner   bytea    NOT NULL,
	mode    smallint NOT NULL,
	session bigint   NOT NULL,
	pid     int      NOT NULL,
	since   bigint   NOT NULL,
	PRIMARY KEY (number, token)
);

CREATE UNLOGGED TABLE IF NOT EXISTS dlm.adv_tickets (
	number  bigint   NOT NULL,
	ticket  bigint   NOT NULL,
	key     bytea    NOT NULL,
	owner   bytea    NOT NULL,
	mode    smallint NOT NULL,
	session bigint   NOT NULL,
	since   bigint   NOT NULL,
	PRIMARY KEY (number, ticket)
);

-- Refuses to work in a session that is not the backend's, as it comes to pass
-- behind a pooler.
CREATE OR REPLACE FUNCTION dlm.adv_claim_v1(p_session bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('dlm_adv.session', true) IS DISTINCT FROM p_session::text THEN
		RAISE EXCEPTION 'dlm: the session is not the one that the backend has begun' USING ERRCODE = 'DL002';
	END IF;
END $$;

-- Says whether another session has ended. Whoever asks shares the lock, so that
-- two who ask do not take each other for the session.
CREATE OR REPLACE FUNCTION dlm.adv_dead_v1(p_session bigint, p_other bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	RETURN p_other <> p_session AND pg_try_advisory_xact_lock_shared(p_other);
END $$;

-- Tells those who may take the key next that they should ask: the head of the
-- queue, and if that wants to share, all up to the first that does not.
CREATE OR REPLACE FUNCTION dlm.adv_wake_v1(p_session bigint, p_number bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	x     dlm.adv_tickets;
	woken boolean := false;
BEGIN
	FOR x IN SELECT * FROM dlm.adv_tickets s WHERE s.number = p_number ORDER BY s.ticket LOOP
		CONTINUE WHEN dlm.adv_dead_v1(p_session, x.session);
		EXIT WHEN x.mode = 0 AND woken;
		PERFORM pg_notify('dlm_s' || x.session, 'w ' || x.ticket);
		EXIT WHEN x.mode = 0;
		woken := true;
	END LOOP;
END $$;

-- Says whether somebody is ahead of a ticket, or for ticket 0 in the queue at
-- all. Dead tickets that it comes across are deleted.
CREATE OR REPLACE FUNCTION dlm.adv_blocked_v1(
	p_session bigint, p_number bigint, p_ticket bigint, p_mode int, OUT blocked boolean, OUT swept boolean
) LANGUAGE plpgsql AS $$
DECLARE
	x dlm.adv_tickets;
BEGIN
	blocked := false;
	swept := false;
	FOR x IN
		SELECT * FROM dlm.adv_tickets s WHERE s.number = p_number AND (p_ticket = 0 OR s.ticket < p_ticket) ORDER BY s.ticket
	LOOP
		IF dlm.adv_dead_v1(p_session, x.session) THEN
			DELETE FROM dlm.adv_tickets s WHERE s.number = p_number AND s.ticket = x.ticket;
			swept := true;
		ELSIF p_ticket = 0 OR p_mode = 0 OR x.mode = 0 THEN
			blocked := true;
			RETURN;
		END IF;
	END LOOP;
END $$;

-- Grants the key, or refuses. With p_want 1 it tries the lock; with 2 the session
-- shares it already; with 0 another owner of the session is in the way. p_ticket is
-- the owner's ticket or 0. The status is 1 if granted, with the token in number; 2
-- if refused, with the token of a holder, if any; 5 if the key in holder has the
-- same number. swept says that others may have come nearer to the head.
--
-- A ticket that was made is no reason to go to sleep: only who asks again after it
-- was committed can rely on being woken, see adv_release_v1.
CREATE OR REPLACE FUNCTION dlm.adv_acquire_v1(
	p_session bigint, p_number bigint, p_key bytea, p_owner bytea, p_mode int, p_want int, p_ticket bigint, p_enqueue int,
	OUT status int, OUT number bigint, OUT holder bytea, OUT place bigint, OUT ticket bigint, OUT swept boolean
) LANGUAGE plpgsql AS $$
DECLARE
	h       dlm.adv_holds;
	blocked boolean := false;
	got     boolean := false;
	made    bigint;
	t       bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
BEGIN
	IF current_setting('dlm_adv.session', true) IS DISTINCT FROM p_session::text THEN
		PERFORM dlm.adv_claim_v1(p_session);
	END IF;
	swept := false;
	IF EXISTS (SELECT FROM dlm.adv_tickets s WHERE s.number = p_number) THEN
		SELECT b.blocked, b.swept INTO blocked, swept FROM dlm.adv_blocked_v1(p_session, p_number, p_ticket, p_mode) b;
	END IF;
	IF NOT blocked THEN
		IF p_want = 2 THEN
			got := true;
		ELSIF p_want = 1 AND p_mode = 1 THEN
			got := pg_try_advisory_lock_shared(p_number);
		ELSIF p_want = 1 THEN
			got := pg_try_advisory_lock(p_number);
		END IF;
	END IF;
	IF got THEN
		IF p_ticket <> 0 THEN
			DELETE FROM dlm.adv_tickets s WHERE s.number = p_number AND s.ticket = p_ticket;
		END IF;
		-- What cannot be there beside us is left from sessions that have ended, or is
		-- being deleted by a release, which is waited for: so there are never two.
		IF EXISTS (SELECT FROM dlm.adv_holds x WHERE x.number = p_number) THEN
			DELETE FROM dlm.adv_holds x WHERE x.number = p_number AND (p_mode = 0 OR x.mode = 0);
		END IF;
		status := 1;
		INSERT INTO dlm.adv_holds AS x
		VALUES (p_number, nextval('dlm.adv_numbers'), p_key, p_owner, p_mode, p_session, pg_backend_pid(), t)
		RETURNING x.token INTO number;
		RETURN;
	END IF;

	status := 2;
	number := 0;
	place := 0;
	FOR h IN SELECT * FROM dlm.adv_holds x WHERE x.number = p_number ORDER BY x.token LOOP
		IF NOT dlm.adv_dead_v1(p_session, h.session) THEN
			number := h.token;
			holder := h.owner;
			EXIT;
		END IF;
	END LOOP;
	IF number <> 0 AND h.key <> p_key THEN
		status := 5;
		holder := h.key;
		RETURN;
	ELSIF blocked THEN
		SELECT s.key INTO holder FROM dlm.adv_tickets s WHERE s.number = p_number AND s.key <> p_key LIMIT 1;
		IF FOUND THEN
			status := 5;
			RETURN;
		END IF;
		IF number <> 0 THEN
			holder := h.owner;
		ELSE
			-- Perhaps the holder has died, and nobody has told the head.
			PERFORM dlm.adv_wake_v1(p_session, p_number);
		END IF;
	END IF;
	made := p_ticket;
	IF p_enqueue = 1 AND NOT EXISTS (SELECT FROM dlm.adv_tickets s WHERE s.number = p_number AND s.ticket = p_ticket) THEN
		made := nextval('dlm.adv_numbers');
		INSERT INTO dlm.adv_tickets VALUES (p_number, made, p_key, p_owner, p_mode, p_session, t);
	END IF;
	ticket := made;
	IF made <> 0 THEN
		place := (SELECT count(*) FROM dlm.adv_tickets s WHERE s.number = p_number AND s.ticket <= made);
	END IF;
END $$;

-- Ends a grant. p_unlock is 1 or 2 if the exclusive or the shared lock goes with
-- it.
--
-- The look at the queue comes after the unlocking, and sees what was committed
-- before it. A waiter commits its ticket and then tries the lock. So either it is
-- seen here and woken, or its ticket was committed after this look, and it finds
-- the lock free.
CREATE OR REPLACE FUNCTION dlm.adv_release_v1(p_session bigint, p_number bigint, p_token bigint, p_unlock int) RETURNS int
LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('dlm_adv.session', true) IS DISTINCT FROM p_session::text THEN
		PERFORM dlm.adv_claim_v1(p_session);
	END IF;
	DELETE FROM dlm.adv_holds x WHERE x.number = p_number AND x.token = p_token;
	IF p_unlock = 1 THEN
		PERFORM pg_advisory_unlock(p_number);
	ELSIF p_unlock = 2 THEN
		PERFORM pg_advisory_unlock_shared(p_number);
	END IF;
	IF p_unlock > 0 AND EXISTS (SELECT FROM dlm.adv_tickets s WHERE s.number = p_number) THEN
		PERFORM dlm.adv_wake_v1(p_session, p_number);
	END IF;
	RETURN 1;
END $$;

-- Gives up a ticket of this session, or with 0 the owner's, whatever its session.
-- Whoever comes next then is woken by adv_wake_v1, in another transaction, for the
-- reason given at adv_release_v1: the ticket must be seen to be gone by those whom
-- its look does not see.
CREATE OR REPLACE FUNCTION dlm.adv_withdraw_v1(p_session bigint, p_number bigint, p_ticket bigint, p_key bytea, p_owner bytea)
RETURNS int LANGUAGE plpgsql AS $$
BEGIN
	PERFORM dlm.adv_claim_v1(p_session);
	IF p_ticket <> 0 THEN
		DELETE FROM dlm.adv_tickets s WHERE s.number = p_number AND s.ticket = p_ticket;
	ELSE
		DELETE FROM dlm.adv_tickets s WHERE s.number = p_number AND s.owner = p_owner AND s.key = p_key;
	END IF;
	RETURN CASE WHEN FOUND THEN 1 ELSE 0 END;
END $$;

-- Unlocks what a failed adv_acquire_v1 may have locked.
CREATE OR REPLACE FUNCTION dlm.adv_undo_v1(p_session bigint, p_number bigint, p_mode int) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
	had boolean;
BEGIN
	PERFORM dlm.adv_claim_v1(p_session);
	IF p_mode = 1 THEN
		had := pg_advisory_unlock_shared(p_number);
	ELSE
		had := pg_advisory_unlock(p_number);
	END IF;
	IF had THEN
		PERFORM dlm.adv_wake_v1(p_session, p_number);
	END IF;
	RETURN 1;
END $$;

-- Says for each of some numbers whether somebody holds its lock: 1 or 0.
CREATE OR REPLACE FUNCTION dlm.adv_held_v1(p_session bigint, p_numbers text[]) RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE
	n       text;
	h       dlm.adv_holds;
	answer  int;
	answers int[] := '{}';
BEGIN
	FOREACH n IN ARRAY p_numbers LOOP
		answer := 0;
		FOR h IN SELECT * FROM dlm.adv_holds x WHERE x.number = n::bigint LOOP
			IF NOT dlm.adv_dead_v1(p_session, h.session) THEN
				answer := 1;
				EXIT;
			END IF;
		END LOOP;
		answers := answers || answer;
	END LOOP;
	RETURN answers;
END $$;

-- Asks the sessions that hold a key to give up the grant with a token, or all of
-- the key if it is 0.
CREATE OR REPLACE FUNCTION dlm.adv_force_v1(p_session bigint, p_number bigint, p_key bytea, p_token bigint)
RETURNS TABLE (owner bytea, token bigint, mode int, held bigint, pid int) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	h dlm.adv_holds;
	t bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
BEGIN
	FOR h IN
		SELECT * FROM dlm.adv_holds x WHERE x.number = p_number AND x.key = p_key AND (p_token = 0 OR x.token = p_token) ORDER BY x.token
	LOOP
		IF NOT dlm.adv_dead_v1(p_session, h.session) THEN
			PERFORM pg_notify('dlm_s' || h.session, 'f ' || h.token);
			RETURN QUERY SELECT h.owner, h.token, h.mode::int, t - h.since, h.pid;
		END IF;
	END LOOP;
END $$;

-- Lists who holds ('h') and who waits for ('w') one key, or with number 0 up to
-- p_limit keys, from p_from on, before p_to, if that is not NULL, and after
-- p_after.
CREATE OR REPLACE FUNCTION dlm.adv_list_v1(
	p_session bigint, p_number bigint, p_from bytea, p_to bytea, p_after bytea, p_limit bigint
) RETURNS TABLE (key bytea, what text, number bigint, owner bytea, mode int, age bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	t bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
BEGIN
	IF p_number <> 0 THEN
		RETURN QUERY
		WITH rows AS (
			SELECT x.key, 'h' AS what, x.token AS number, x.owner, x.mode::int AS mode, t - x.since AS age, x.session
			FROM dlm.adv_holds x WHERE x.number = p_number AND x.key = p_from
			UNION ALL
			SELECT s.key, 'w', s.ticket, s.owner, s.mode::int, t - s.since, s.session
			FROM dlm.adv_tickets s WHERE s.number = p_number AND s.key = p_from),
		live AS MATERIALIZED (
			SELECT d.session FROM (SELECT DISTINCT r.session FROM rows r) d WHERE NOT dlm.adv_dead_v1(p_session, d.session))
		SELECT r.key, r.what, r.number, r.owner, r.mode, r.age FROM rows r JOIN live l ON l.session = r.session ORDER BY 2, 3;
		RETURN;
	END IF;
	RETURN QUERY
	WITH rows AS (
		SELECT x.key, 'h' AS what, x.token AS number, x.owner, x.mode::int AS mode, t - x.since AS age, x.session
		FROM dlm.adv_holds x WHERE x.key >= p_from AND (p_to IS NULL OR x.key < p_to) AND x.key > p_after
		UNION ALL
		SELECT s.key, 'w', s.ticket, s.owner, s.mode::int, t - s.since, s.session
		FROM dlm.adv_tickets s WHERE s.key >= p_from AND (p_to IS NULL OR s.key < p_to) AND s.key > p_after),
	live AS MATERIALIZED (
		SELECT d.session FROM (SELECT DISTINCT r.session FROM rows r) d WHERE NOT dlm.adv_dead_v1(p_session, d.session)),
	used AS (SELECT DISTINCT r.key FROM rows r JOIN live l ON l.session = r.session ORDER BY r.key LIMIT p_limit)
	SELECT r.key, r.what, r.number, r.owner, r.mode, r.age
	FROM rows r JOIN live l ON l.session = r.session JOIN used u ON u.key = r.key ORDER BY 1, 2, 3;
END $$;

-- Deletes what dead sessions have left. It waits for nobody.
CREATE OR REPLACE FUNCTION dlm.adv_sweep_v1(p_session bigint) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
	dead bigint[];
BEGIN
	dead := ARRAY(
		SELECT d.session
		FROM (SELECT x.session FROM dlm.adv_holds x UNION SELECT s.session FROM dlm.adv_tickets s) d
		WHERE dlm.adv_dead_v1(p_session, d.session));
	IF cardinality(dead) > 0 THEN
		DELETE FROM dlm.adv_holds WHERE ctid = ANY (ARRAY(
			SELECT x.ctid FROM dlm.adv_holds x WHERE x.session = ANY (dead) FOR UPDATE SKIP LOCKED));
		DELETE FROM dlm.adv_tickets WHERE ctid = ANY (ARRAY(
			SELECT s.ctid FROM dlm.adv_tickets s WHERE s.session = ANY (dead) FOR UPDATE SKIP LOCKED));
	END IF;
	RETURN 1;
END $$;

INSERT INTO dlm.meta VALUES (1, 3, 0) ON CONFLICT DO NOTHING;
UPDATE dlm.meta SET version = 3 WHERE id = 1 AND version < 3;
